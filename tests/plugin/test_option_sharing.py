"""--slm-sharing is how replicas share the device."""

from inside import usage_error


def test_each_way_is_measured(gain, archive):
    gain("--slm-sharing=mps,mig", "-k", "point_of_replicas").assert_outcomes(passed=3)
    assert {m.replica.sharing for m in archive().measurements if m.replica.count > 1} == {"mps", "mig"}


def test_other_words_are_refused(gain):
    problem = "'luck' is not of time-slicing, mps, mig, gpus, with commas between them: luck is unknown"
    assert problem in usage_error(gain("--slm-sharing=luck"))
