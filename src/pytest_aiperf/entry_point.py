"""What pytest loads where this package is installed, and what loads the plugin.

The plugin then has the name of its module however it is loaded, so that a second way to load it,
such as ``-p pytest_aiperf.plugin``, does nothing. Under two names, pytest would refuse it.
"""

pytest_plugins = ("pytest_aiperf.plugin",)
