"""The live pages of all runs in a storage: what is read, what is shown, and the server. They write nothing.

A request for a run's page takes this path:

    http_server.Server                checks the host name in the request
    site.Site.answer                  chooses the page, and answers with its newest reading
    refreshing.RefreshingValue        starts another reading in the background if it is due
    page_process.PageProcess.read     lets a process with limited memory and time make the page
    pages.read_run                    reads the run and makes the page, in that process

The server itself reads the list of all runs (all_runs.py).
"""
