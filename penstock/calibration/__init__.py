"""From what ranks measured to costs: what is read off traces, the fit of layers, the fit of links."""
