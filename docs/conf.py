"""The site: `make site`. Pages are read as GitHub reads them; links between them are checked."""

import sdp_plugins

project = "sdp_plugins"
author = copyright = "the authors of sdp_plugins"
release = version = sdp_plugins.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_heading_anchors = 4
highlight_language = "none"
nb_execution_mode = "off"  # the tests execute notebooks
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "inherited-members": False}
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
add_module_names = False

html_theme = "furo"
html_title = f"sdp_plugins {release}"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_show_sphinx = False
pygments_style, pygments_dark_style = "friendly", "monokai"
copybutton_prompt_text = "$ "
