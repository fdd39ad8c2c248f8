"""Serves live pages about all runs in a storage location. It never writes to storage.

A request for a run's page takes this path:

    http_server.Server                checks the host name in the request
    site.Site.answer                  chooses the page, and returns its newest version
    refreshing.RefreshingValue        starts another read in the background if one is due
    page_process.PageProcess.read     renders the page in a process with limited memory and time
    pages.read_run                    reads the run and renders the page, in that process

The server itself reads the list of all runs (all_runs.py).
"""
