"""--slm-ray-resource takes only nodes that have that Ray resource; tests/run/ray_cluster asks a cluster for one."""

from __future__ import annotations

from inside import usage_error


def test_it_is_for_the_nodes_of_a_cluster(sweep):
    assert "--slm-ray-resource is for the nodes of a Ray" in usage_error(sweep("--slm-ray-resource=quiet"))
