"""Code that runs in vLLM's interpreter, with only the standard library and vLLM.

Its modules import each other by bare name, because only this folder is on the path there.
"""
