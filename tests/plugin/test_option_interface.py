"""--slm-interface: into vLLM's engine itself, or by HTTP into its server."""

from inside import usage_error


def test_an_interface_that_is_none_is_refused(sweep):
    assert "engine or server" in usage_error(sweep("--slm-interface=back"))


def test_the_simulated_engine_has_no_server(sweep):
    assert "the simulated engine has no server" in usage_error(sweep("--slm-interface=server"))


def test_by_default_it_is_the_engine_itself(sweep, archive):
    sweep("--slm-concurrency=4").assert_outcomes(passed=1)
    assert {m.spec.interface for m in archive().measurements} == {"engine"}
