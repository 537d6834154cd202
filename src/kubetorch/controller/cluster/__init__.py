"""What only the controller in a cluster needs: who may do what, and who leads."""
