"""How long tests wait for what is bound to come: long enough for any machine, and only a test that fails does."""

#: For what one process does.
PATIENCE_S = 30.0
#: For whole processes, which take seconds of a core each before they begin.
PROCESSES_S = 240.0
