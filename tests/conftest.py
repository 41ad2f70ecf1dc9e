"""Its being here puts this folder on the path: a test writes `from strategies import measurement`."""

from real_engine import real_pool, vllm_here  # noqa: F401 - fixtures for tests/engines and tests/real
