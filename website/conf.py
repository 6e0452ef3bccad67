"""How Sphinx makes the site of the sources that `pages.write` has written."""

project, author = "vcluster", "the authors of vcluster"
extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence", "deflist", "strikethrough"]
myst_heading_anchors = 4
suppress_warnings = [
    "misc.highlighting_failure",    # a block that shows a mistake is no right Python
    "myst.strikethrough",           # the site is HTML
]
default_role = "code"
highlight_language = "text"
python_maximum_signature_line_length = 100
add_module_names = False
toc_object_entries = False

html_theme = "furo"
html_title = "vcluster"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_search_summary = False    # a page that is read from a file may fetch no other one
html_domain_indices = False
