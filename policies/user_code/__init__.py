"""The boundary between this project and a user's policy: whose frame failed, and the sentence about it."""
