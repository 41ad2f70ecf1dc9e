"""Code that runs inside vLLM's interpreter: standard library and vLLM only. Its modules import each other by bare name,
because there this folder alone is on the path."""
