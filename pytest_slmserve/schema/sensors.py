"""Quantities that sensors report, by the number of NVIDIA's DCGM field, or else a number of ours.

Names of DCGM's fields change between releases (4.6 renamed most), but numbers do not.
"""

from dataclasses import dataclass

OURS = 9000  # DCGM's numbers end far below


@dataclass(frozen=True, slots=True)
class Sensor:
    """Quantity in SI units and ratios of 1.

    Attributes:
        names: DCGM's name, and that of 4.6 if it differs; or ours.
        resolution: stored values are multiples of it.
    """

    names: tuple[str, ...]
    unit: str
    resolution: float


GPU_UTIL, ENGINE_ACTIVE, SM_ACTIVE, SM_OCCUPANCY, TENSOR_ACTIVE, DRAM_ACTIVE = 203, 1001, 1002, 1003, 1004, 1005
POWER, POWER_INSTANT, ENERGY, POWER_LIMIT = 155, 157, 156, 164
SM_CLOCK, MEMORY_CLOCK, TEMPERATURE, MEMORY_USED = 100, 101, 150, 252
CLOCK_REASONS, XID, ECC_DOUBLE_BIT, REMAPPED_ROWS = 112, 230, 311, 393
CAPPED_POWER, CAPPED_SW_THERMAL, CAPPED_HW_THERMAL, CAPPED_BRAKE = 1420, 1422, 1423, 1424
GPU_PROCESSES, FOREIGN_PROCESSES = 9001, 9002
OWN_CORES, OWN_MEMORY, HOST_CORES, STOLEN_CORES = 9011, 9012, 9013, 9014
CPU_PRESSURE, MEMORY_PRESSURE, CPU_THROTTLED = 9015, 9016, 9017
PROBE, PROBE_CPU = 9018, 9019
SPEED_PROBE = "host-speed probe"  # prefix of the name of its source in a record

PROFILED = (ENGINE_ACTIVE, SM_ACTIVE, SM_OCCUPANCY, TENSOR_ACTIVE, DRAM_ACTIVE)  # what DCGM calls PROF

SENSORS: dict[int, Sensor] = {
    GPU_UTIL: Sensor(("DCGM_FI_DEV_GPU_UTIL",), "ratio", 0.01),
    ENGINE_ACTIVE: Sensor(("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO"), "ratio", 1e-4),
    SM_ACTIVE: Sensor(("DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_PROF_SM_UTIL_RATIO"), "ratio", 1e-4),
    SM_OCCUPANCY: Sensor(("DCGM_FI_PROF_SM_OCCUPANCY", "DCGM_FI_PROF_SM_OCCUPANCY_RATIO"), "ratio", 1e-4),
    TENSOR_ACTIVE: Sensor(("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "DCGM_FI_PROF_TENSOR_UTIL_RATIO"), "ratio", 1e-4),
    DRAM_ACTIVE: Sensor(("DCGM_FI_PROF_DRAM_ACTIVE", "DCGM_FI_PROF_DRAM_UTIL_RATIO"), "ratio", 1e-4),
    POWER: Sensor(("DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_BOARD_POWER_WATTS"), "W", 1e-3),
    POWER_INSTANT: Sensor(("DCGM_FI_DEV_POWER_USAGE_INSTANT", "DCGM_FI_DEV_BOARD_POWER_RAW_WATTS"), "W", 1e-3),
    ENERGY: Sensor(("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",), "J", 1e-3),
    POWER_LIMIT: Sensor(
        ("DCGM_FI_DEV_ENFORCED_POWER_LIMIT", "DCGM_FI_DEV_BOARD_POWER_LIMIT_ENFORCED_WATTS"), "W", 1e-3
    ),
    SM_CLOCK: Sensor(("DCGM_FI_DEV_SM_CLOCK",), "Hz", 1e6),
    MEMORY_CLOCK: Sensor(("DCGM_FI_DEV_MEM_CLOCK",), "Hz", 1e6),
    TEMPERATURE: Sensor(("DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_GPU_TEMP_CELSIUS"), "°C", 1.0),
    MEMORY_USED: Sensor(("DCGM_FI_DEV_FB_USED",), "bytes", float(1 << 20)),
    CLOCK_REASONS: Sensor(("DCGM_FI_DEV_CLOCK_THROTTLE_REASONS", "DCGM_FI_DEV_CLOCKS_EVENT_REASONS"), "bits", 1.0),
    XID: Sensor(("DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_DEV_XID_ERROR"), "number of the last error, 0: none", 1.0),
    ECC_DOUBLE_BIT: Sensor(("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL",), "errors", 1.0),
    REMAPPED_ROWS: Sensor(
        ("DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", "DCGM_FI_DEV_ROW_REMAP_UNCORRECTABLE_TOTAL"), "rows", 1.0
    ),
    CAPPED_POWER: Sensor(("DCGM_FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP_NS",), "s", 1e-6),
    CAPPED_SW_THERMAL: Sensor(("DCGM_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN_NS",), "s", 1e-6),
    CAPPED_HW_THERMAL: Sensor(("DCGM_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN_NS",), "s", 1e-6),
    CAPPED_BRAKE: Sensor(("DCGM_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN_NS",), "s", 1e-6),
    GPU_PROCESSES: Sensor(("processes that compute on the GPU",), "processes", 1.0),
    FOREIGN_PROCESSES: Sensor(("of them not started by this run",), "processes", 1.0),
    OWN_CORES: Sensor(("CPU time of this run's processes",), "cores", 1e-3),
    OWN_MEMORY: Sensor(("resident memory of this run's processes",), "bytes", float(1 << 20)),
    HOST_CORES: Sensor(("CPU time of all processes",), "cores", 1e-3),
    STOLEN_CORES: Sensor(("CPU time that the hypervisor gave to others",), "cores", 1e-3),
    CPU_PRESSURE: Sensor(("share of time in which a task waited for a CPU",), "ratio", 1e-4),
    MEMORY_PRESSURE: Sensor(("share of time in which a task waited for memory",), "ratio", 1e-4),
    CPU_THROTTLED: Sensor(("share of time in which the CPU quota was used up",), "ratio", 1e-4),
    PROBE: Sensor(("time of a fixed piece of Python, begun at the reading before",), "s", 1e-6),
    PROBE_CPU: Sensor(("its CPU time",), "s", 1e-6),
}


def per_unit(number: int) -> float:
    """Return the steps of a sensor's resolution in its unit; a million for a sensor that only another release has."""
    resolution = SENSORS[number].resolution if number in SENSORS else 1e-6
    return 1 / resolution if resolution >= 1 else round(1 / resolution)  # a whole number, so that 0.15 stays 0.15


def rounded(number: int, value: float | None) -> float | None:
    """Return the value rounded to the sensor's resolution, as in results files, so that both print the same."""
    return None if value is None else round(value * per_unit(number)) / per_unit(number)
