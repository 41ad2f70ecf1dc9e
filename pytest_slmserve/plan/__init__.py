"""Planning: options and host become engines, workloads, cases, estimates and an order.

Nothing here starts an engine.
"""
