"""What several scripts share.

The folder of a script that is run is on the path, and this package is beside it. So a script
appends the folder `scripts` to `sys.path` before it imports from here. Only `models` and `texts`
import quantkit and torch, and `llama` imports numpy: scripts that run in another tool's environment
leave them out, or import what that environment has.
"""
