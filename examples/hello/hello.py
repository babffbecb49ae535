"""An ordinary function: a dictionary in, a dictionary out.

thaw action create hello examples/hello/hello.py
thaw action invoke hello --result -p name Ada
"""


def main(args):
    name = args.get("name", "stranger")
    print(f"greeting {name}")  # thaw activation logs --last
    return {"greeting": f"Hello, {name}!"}
