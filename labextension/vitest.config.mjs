import { defineConfig } from 'vitest/config';

// Stores and formatters need no DOM; what does is tested in Chromium.
export default defineConfig({
  test: {
    environment: 'node',
    include: ['src/**/__tests__/*.spec.ts'],
    isolate: false
  }
});
