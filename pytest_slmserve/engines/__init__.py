"""Engines behind one interface: launch, device sharing and load generation. Nothing here evaluates measurements."""
