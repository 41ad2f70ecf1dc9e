"""--slm-pin-cores gives each replica its own part of the CPU cores."""


def test_cores_are_pinned_when_asked(gain, archive):
    gain("--slm-sharing=time-slicing", "-k", "point_of_replicas")
    gain("--slm-pin-cores", "--slm-sharing=time-slicing", "-k", "point_of_replicas")
    assert [m.replica.pinned for m in archive().measurements if m.replica.count > 1] == [False] * 4 + [True] * 4
