"""What an author needs: new files to start from, checks that hold them to their word, and cards."""
