"""The public API: verbs over the parts below. `kubetorch/__init__.py` lists its names."""
