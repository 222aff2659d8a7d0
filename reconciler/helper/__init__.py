"""The one program that acts on a host; standard library only."""
