"""Draws what a command has on its terminal at a moment, as SVG.

    pip install pyte    # emulates the terminal; GNU LGPL
    PYTHONWARNINGS=ignore python tools/terminal_shot.py docs/images/run.svg "Epoch 4/7" \
        sdp run -n 2 examples/digits_lightning.py --strategy smddp
"""

import argparse
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import termios
from itertools import groupby
from pathlib import Path

import pyte
from rich.console import Console
from rich.style import Style
from rich.text import Text

COLUMNS, ROWS = 110, 18


def screen_of(command: list[str], until: str) -> pyte.Screen:
    """Run a command to its end; return its screen when a text was there last."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    job = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    output, seen = b"", 0
    while True:
        try:
            output += os.read(ours, 1 << 16)
        except OSError:  # the command has ended
            break
        if until in output.decode(errors="ignore").rpartition("\r")[2]:
            seen = len(output)
    os.close(ours)
    if job.wait() or not seen:
        raise SystemExit(f"{command[0]} ended with {job.returncode}, {seen=}")
    screen = pyte.Screen(COLUMNS, ROWS)
    pyte.ByteStream(screen).feed(output[:seen])
    return screen


def line_of(screen: pyte.Screen, row: int) -> Text:
    """A line of a screen, with its colours."""
    line = Text()
    characters = [screen.buffer[row][column] for column in range(COLUMNS)]
    for (name, bold), alike in groupby(characters, lambda each: (each.fg, each.bold)):
        colour = re.sub("^[0-9a-f]{6}$", r"#\g<0>", name).replace("bright", "bright_")
        style = Style(color=colour.replace("brown", "yellow"), bold=bold)
        line.append("".join(each.data for each in alike), style)
    line.rstrip()
    return line


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("until", help="the picture is of the last moment with this text")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    screen = screen_of(args.command, args.until)
    options = {"width": COLUMNS, "color_system": "truecolor", "highlight": False}
    console = Console(record=True, file=io.StringIO(), **options)
    console.print(f"$ {' '.join(args.command)}")
    for row in range(screen.cursor.y + 1):
        console.print(line_of(screen, row))
    svg = console.export_svg(title="")
    svg = re.sub(
        r"@font-face \{.*?\}", "", svg, flags=re.DOTALL
    )  # nothing is loaded from elsewhere
    args.file.write_text(svg.replace("Fira Code", "monospace").replace("\n\n", "\n"))


if __name__ == "__main__":
    main()
