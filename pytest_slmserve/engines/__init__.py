"""Engines behind one interface: how they are launched, shared and loaded. Nothing here judges a measurement."""
