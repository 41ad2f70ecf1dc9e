"""Views for other tools: pytest-benchmark, asv, vLLM's JSON, CSV."""
