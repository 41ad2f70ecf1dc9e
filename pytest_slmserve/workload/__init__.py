"""Requests, never engines: lengths, conversations, token ids."""
