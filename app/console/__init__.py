"""The console: pages at `/console` for people who look at runs and do the few things that are done by hand.

    app.py          the application: which pages there are, security headers, errors as pages, static files
    api.py          how a page asks the API: in process, with the signed-in person's own key or session
    session.py      signing in and out, and which requests may change something
    templating.py   how templates are rendered: escaped, with filters for money, times and counts
    forms.py        forms: faults beside fields, confirmations, one effect for a form that is sent twice
    run.py          the page of one run, two runs side by side, and the explanation of a run
    drawing.py      the graph and the timeline in pixels and percent, and what their edges and bars mean in words
    step_pane.py    one step: what it saw and did not see, its texts and its calls
    live.py         event streams of patches: at most ten a second, with ids that a reconnect goes on from

The console has no way of its own to the data: what a page shows, the same person can read from the API.
"""
