"""Views for other tools: asv, and vLLM's JSON."""
