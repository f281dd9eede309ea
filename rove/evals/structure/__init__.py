"""What the mixer of attention is: `mixer` has the maths, `run` measures, `picture` draws."""
