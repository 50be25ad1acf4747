"""What tests of every part share: tiny checkpoints and random blocks. Imported as `support.checkpoints`."""
