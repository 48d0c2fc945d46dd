"""Write a rank's output so that its nanny can publish it."""
