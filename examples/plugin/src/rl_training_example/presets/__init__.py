"""Presets, as `<algorithm>/<name>.yaml`."""
