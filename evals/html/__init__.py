"""An evaluation as one page of HTML that needs nothing else: no network, no fonts, and no scripts to be read."""
