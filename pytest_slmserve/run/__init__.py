"""One run: the session, its devices and results, and who measures, judges, gates and advises in it. Nothing here
imports pytest."""
