"""Read-only access to the host and its sensors. It never starts, stops or configures a device."""
