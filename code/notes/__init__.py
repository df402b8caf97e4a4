"""What the notes quote, show and count, and the one program that writes it into them."""
