"""What people look at: a plan's timeline as a picture, in a self-contained HTML page, an SVG, or a terminal."""
