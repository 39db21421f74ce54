"""Commands that check the journal, the transparency log and the policy, and list who has changed or seen what."""
