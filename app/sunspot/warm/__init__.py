"""Warm restarts: on each node a process that has imported what training needs, and forks the next group's workers.

Importing takes a worker many times as long as everything else before its first step. Ray starts the client in Python's
place (`fork_server.executable`): it has the node's server fork a worker, and stands for it until that ends. Without a
server the client becomes the worker itself, as if there were no warm restarts. The first group's workers start the
servers.
"""

forked = False
"""Whether this process was forked by a server."""
