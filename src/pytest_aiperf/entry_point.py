"""The entry point that pytest loads if this package is installed; it loads the plugin.

The plugin is thereby registered under the name of its module, however it is loaded. Loading it in a
second way, such as ``-p pytest_aiperf.plugin``, then does nothing. Under two names, pytest would
refuse it.
"""

pytest_plugins = ("pytest_aiperf.plugin",)
