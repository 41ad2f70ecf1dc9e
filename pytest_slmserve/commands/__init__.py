"""Command line, with one module for each command, which parses, calls and prints. Wrong usage raises BadUsage."""
