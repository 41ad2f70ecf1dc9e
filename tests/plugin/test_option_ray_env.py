"""--slm-ray-env names a JSON file with the runtime_env of what runs on the nodes; tests/run/ray_cluster has one."""

from __future__ import annotations

import pytest
from inside import usage_error


def test_it_is_for_the_nodes_of_a_cluster(sweep):
    assert "--slm-ray-env is for the nodes of a Ray cluster" in usage_error(sweep("--slm-ray-env=env.json"))


@pytest.mark.parametrize(
    ("text", "told"), [(None, "cannot read env.json"), ("pip: vllm", "env.json is not JSON"), ("[]", "no JSON object")]
)
def test_a_file_that_holds_none_is_told_before_anybody_is_asked(sweep, pytester, text, told):
    if text is not None:
        (pytester.path / "env.json").write_text(text)
    assert told in usage_error(sweep("--slm-ray=127.0.0.1:9", "--slm-ray-env=env.json"))
