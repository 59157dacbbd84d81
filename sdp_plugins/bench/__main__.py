"""`python -m sdp_plugins.bench`."""

from sdp_plugins.bench.cli import app

if __name__ == "__main__":
    app(prog_name="python -m sdp_plugins.bench")
