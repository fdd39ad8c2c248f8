"""The live page over all runs of a storage: what it reads, what it shows, and the server. It writes nothing."""
