"""Code that several test modules share. Test modules import from here, never from each other."""
