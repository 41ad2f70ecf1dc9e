"""Files on disk: results files, baselines, calibrations, waivers and results of other tools."""
