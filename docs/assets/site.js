// What the theme leaves out for people without a mouse or without sight: a name for the search, scrolling by keys.
document$.subscribe(() => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  for (const scrolled of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code, .highlight pre")) {
    if (scrolled.scrollWidth > scrolled.clientWidth) scrolled.tabIndex = 0;
  }
});
