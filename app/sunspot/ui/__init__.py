"""The live page over all runs of a storage: what it reads, what it shows, and the server. It writes nothing.

The way of a request for a run's page:

    http_server.Server             checks whom it asks for
    site.Site.answer               chooses the page, and answers with its newest reading
    refreshed.RefreshingValue            begins another reading in the background, if that is due
    page_process.PageProcess.read  has a process with limits of memory and time make it
    pages.read_run                 reads the run, and makes the page: that process calls it

The list of all runs is read by the server itself (all_runs.py).
"""
