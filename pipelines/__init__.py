"""What a person runs: `python -m pipelines COMMAND`. Thin: parse, call the library, show, write."""
