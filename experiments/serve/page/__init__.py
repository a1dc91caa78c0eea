"""The page of the server: live figures and a chat box."""
