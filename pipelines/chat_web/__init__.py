"""The chat in the browser: Gradio's queue, state and upload, and pages of our own."""
