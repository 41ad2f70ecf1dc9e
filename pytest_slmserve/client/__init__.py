"""The load generator for servers: streaming requests over HTTP, from a process of its own. Standard library only."""
