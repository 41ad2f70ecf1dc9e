"""The host and its sensors: what is sampled beside a window. Nothing here starts, stops or configures a device."""
